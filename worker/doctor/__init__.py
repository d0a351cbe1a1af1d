"""`worker doctor`: checks of server, queue and machine. Nothing of the worker itself imports it."""
