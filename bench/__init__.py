"""Speed, measured as ratios against a peer or a limit. Nothing here is imported by the product."""
