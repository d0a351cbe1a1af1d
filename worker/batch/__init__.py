"""Batch files: OpenAI's request lines in, its response lines out, through a queue or on an engine of this machine.

    input file -> source (numbered records) -> lines (a record as a job body, or what is wrong with it)
               -> plan (the whole file checked; which lines are done) -> queue_road or local_road -> output (appended, synced)

Relies on the client for the queue and on the worker's own parts for the local road. Imports no torch.
"""
