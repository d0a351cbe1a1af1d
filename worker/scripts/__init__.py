"""The Lua scripts behind every change of a job's state, one file each; worker/broker.py runs them."""
