"""Jobs in, text out: the queue side of slotmill."""
