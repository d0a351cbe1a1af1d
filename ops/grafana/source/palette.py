"""Colours by meaning, the same on every dashboard, from the palette of Okabe and Ito, which colour-blind people tell apart.

The states of a label stand here in the order in which they are stacked: work at the bottom, idleness on top. Grey is always
what nobody uses. Source of the colours: Okabe and Ito, Color Universal Design, https://jfly.uni-koeln.de/color/ (2008).
"""

from typing import NamedTuple

GREEN = "#009E73"
BLUE = "#0072B2"
SKY = "#56B4E9"
ORANGE = "#E69F00"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
YELLOW = "#F0E442"
GREY = "#999999"

AGES = ((None, GREEN), (1800, ORANGE), (14400, VERMILLION))
"""From which age on the oldest waiting job has which colour: as SlotmillBacklogOld fires for the normal and the low lane."""


class State(NamedTuple):
    """One value of a label."""

    value: str
    words: str
    colour: str


SLOTS = (
    State("decode", "Decode: a token each", GREEN),
    State("prefill", "Prefill: reads a prompt", BLUE),
    State("finished", "Finished: held by a request that has ended", PURPLE),
    State("no_memory", "No memory: a request waits for KV blocks", VERMILLION),
    State("no_budget", "No budget: a request waits for the next step", ORANGE),
    State("no_work", "No work: nothing waits", GREY),
)
PHASES = (
    State("decode", "Decode only", GREEN),
    State("prefill", "Prefill only", BLUE),
    State("mixed", "Both in one step", SKY),
)
PARTS = (
    State("forward", "Forward: the model computes", GREEN),
    State("sample", "Sample: draw tokens", SKY),
    State("prepare", "Prepare: lay out inputs", YELLOW),
    State("schedule", "Schedule: decide who runs", ORANGE),
    State("update", "Update: take in results", PURPLE),
)
BLOCKS = (
    State("used", "Used by running requests", GREEN),
    State("cached", "Cached: free, but worth finding again", SKY),
    State("free", "Free and empty", GREY),
)
MODES = (
    State("swap", "Swap: copied to the host and back", ORANGE),
    State("recompute", "Recompute: computed again", VERMILLION),
)
DIRECTIONS = (
    State("out", "Out: to the host", ORANGE),
    State("in", "In: back to the device", BLUE),
)
WASTE = (
    State("run_ahead", "Run ahead: a request had ended meanwhile", SKY),
    State("preempted", "Preempted: given up for want of blocks", VERMILLION),
    State("aborted", "Aborted: its job was given back", ORANGE),
    State("fenced", "Fenced: another worker has the job", PURPLE),
)
WORKERS = (
    State("serving", "Serving", GREEN),
    State("loading", "Loading the model", SKY),
    State("draining", "Draining", ORANGE),
    State("stalled", "Stalled", VERMILLION),
)
MEMORY = (
    State("weights", "Weights", BLUE),
    State("kv_cache", "KV cache", GREEN),
    State("activations", "Activations of a step", SKY),
    State("graphs", "Recorded graphs", YELLOW),
    State("other", "Other", PURPLE),
    State("free", "Free", GREY),
)
LANES = (
    State("high", "High", PURPLE),
    State("normal", "Normal", BLUE),
    State("low", "Low", SKY),
)
CLAIMS = (
    State("new", "New", GREEN),
    State("released", "Released: given back by a worker", SKY),
    State("reclaimed", "Reclaimed: its worker had died", ORANGE),
)
FENCES = (
    State("renew", "Seen at a renewal", PURPLE),
    State("emit", "Seen when writing tokens", ORANGE),
    State("finish", "Seen when writing the result", SKY),
    State("retry", "Seen when it was to be tried again", BLUE),
    State("unwritable", "Could not be written: a fault of ours", VERMILLION),
)
ERRORS = (
    State("connection", "Connection refused or lost", VERMILLION),
    State("timeout", "No answer in time", ORANGE),
    State("auth", "Login or rights refused", PURPLE),
    State("loading", "Server still loads its data", SKY),
    State("readonly", "A replica, after a failover", BLUE),
    State("out_of_memory", "Server out of memory", YELLOW),
    State("response", "Any other refusal", GREY),
)
ENDS = (
    State("succeeded", "Succeeded", GREEN),
    State("cancelled", "Cancelled", GREY),
    State("expired", "Expired: past its deadline", ORANGE),
    State("failed", "Failed", VERMILLION),
    State("dead", "Dead: set aside for people", PURPLE),
)
