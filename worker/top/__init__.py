"""`worker top`: looks at a queue and its workers. Nothing of the worker itself imports it."""
