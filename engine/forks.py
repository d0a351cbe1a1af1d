"""Choices and beams as forks: sequences that share a prompt's blocks, and copy one when they write to it.

Relies on `beam` for which beams live on, on `lineup` and `tables` for places and blocks. Leaves to `scheduler` when a prompt
is computed, and when a search has to give way.
"""

from collections.abc import Sequence as Items

from engine.beam import Survivor
from engine.config import SchedulerConfig
from engine.decision import Candidates, Ended
from engine.lineup import Lineup
from engine.sequence import Sequence
from engine.stopping import limit_detail
from engine.tables import BlockTables


class Forks:
    """Makes forks of running sequences, and lets go of those that are not continued."""

    def __init__(self, config: SchedulerConfig, lineup: Lineup, tables: BlockTables) -> None:
        self._config = config
        self._lineup = lineup
        self._tables = tables

    def choices(self, root: Sequence) -> list[Sequence]:
        """The choices of a prompt that is computed, the root as the first: all share its blocks."""
        root.num_in_flight = 0
        width = self._lineup.narrow(root)
        forks = [root, *(self._lineup.branch(root, root.choice + index) for index in range(1, width))]
        self._tables.divide_reserve(forks)
        return forks

    def advance(self, rows: Items[tuple[Sequence, Candidates]]) -> Ended | None:
        """Turn a search's decision about its beams and their candidates into forks and freed blocks.

        Returns the end of the search when it is over: the first beam stands for it, and still runs.
        """
        beams = [sequence for sequence, _ in rows]
        first, search = beams[0], beams[0].beam_search
        assert search is not None
        is_last = len(first.token_ids) + 1 >= first.num_tokens_limit
        outputs = [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in beams]
        survivors = search.advance([candidates for _, candidates in rows], outputs, is_last=is_last)
        for beam in beams:
            beam.num_in_flight = 0
        self._lineup.narrow(first)
        if survivors:
            search.arrange([beam.choice for beam in self._continued(beams, survivors)])
            return None
        is_cut = is_last and len(outputs[0]) + 1 < first.request.params.max_tokens
        detail = limit_detail(len(first.token_ids) + 1, self._config.max_model_len) if is_cut else ""
        for beam in beams[1:]:
            self._lineup.remove(beam)
        return Ended(first, search.hypotheses[0].reason, detail)

    def _continued(self, beams: list[Sequence], survivors: list[Survivor]) -> list[Sequence]:
        """The next step's beams: each goes on as its first survivor, or ends; further survivors are forks of it.

        What the search was promised stays with it: blocks that no beam holds any more are set aside again.
        """
        num_held = self._tables.num_held
        chosen = {survivor.parent for survivor in survivors}
        free_choices = sorted({*range(len(survivors))} - {beams[parent].choice for parent in chosen})
        for parent, beam in enumerate(beams):
            if parent not in chosen:
                self._lineup.remove(beam)
        next_beams: list[Sequence] = []
        for survivor in survivors:
            beam = beams[survivor.parent]
            next_beams.append(beam if beam not in next_beams else self._lineup.branch(beam, free_choices.pop(0)))
        for beam, survivor in zip(next_beams, survivors, strict=True):
            beam.token_ids.append(survivor.token_id)
        if self._config.reservation != "paged":
            self._tables.reserve(next_beams[0], num_held - self._tables.num_held)
        return next_beams
