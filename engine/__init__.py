"""Token ids in, token ids out: the continuous-batching, paged-KV engine of slotmill."""
