"""The engine beside its peers on a standard workload, each at its best settings on this machine: tokens per second, ratios.

    python -m bench.peers [sharegpt|alpaca] [--peers vllm,llama.cpp,...] [--repeats K] [--limit N] [--json OUT]
    python -m bench.peers --trial             only the trials that choose settings
    python -m bench.peers --fix vllm:dtype=float32,slots=64 --fix slotmill:dtype=float32

First a trial of every candidate of bench/sides.py on the first few requests; the fastest of each peer goes on. Then all of them
load, and take turns on the same requests, ours first, the others stopped meanwhile; from the second turn on only ours and the
fastest peer, so that the ratio that matters has the most pairs. Generation is timed alone. Each run says how many cores others
used.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench.figures import ratio, spread
from bench.meter import Meter
from bench.record import engine_options, json_option, record, save
from bench.sides import OURS, SIDES, Running, Settings, Side, model_of
from bench.workload import SHAPES, WorkItem, make_workload
from engine.model import locate, resolve

SLOTS = {"sharegpt": 64, "alpaca": 128}
"""Requests in one step; vLLM's best, and no engine is held to fewer than it wants."""
AGREE = 8
"""First tokens of an output that are compared with ours: equal ones show that the same model saw the same prompt."""


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(sorted(SHAPES)), default="sharegpt")
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--peers", "names", default=",".join(side.name for side in SIDES), show_default=True)
@click.option("--repeats", type=int, default=3, show_default=True, help="turns")
@click.option("--limit", type=int, help="only the first LIMIT requests")
@click.option("--cap", type=int, help="cut prompts and outputs to CAP tokens: to try things, not to compare")
@click.option("--trial-limit", type=int, default=16, show_default=True, help="requests of a trial")
@click.option("--trial-cap", type=int, default=48, show_default=True, help="tokens of a trial's outputs: a wrong dtype is slow")
@click.option("--trial", "is_trial", is_flag=True, help="stop after the trials")
@click.option("--fix", "fixed", multiple=True, metavar="NAME:FIELD=VALUE,...", help="settings of a side, without a trial")
@json_option
def main(
    name: str,
    model: str,
    names: str,
    repeats: int,
    limit: int | None,
    cap: int | None,
    trial_limit: int,
    trial_cap: int,
    is_trial: bool,
    fixed: tuple[str, ...],
    json_path: Path | None,
) -> None:
    directory, source = resolve(model), locate(model)
    assert source
    workload = make_workload(name, directory)
    items = [WorkItem(item.prompt[:cap], min(item.output, cap or item.output)) for item in workload.items[:limit]]
    few = [WorkItem(item.prompt, min(item.output, trial_cap)) for item in items[:trial_limit]]
    peers = {side.name: side for side in SIDES}
    sides = [OURS, *(peers[peer] for peer in names.split(",") if peer)]
    given = {side: engine_options(options) for side, _, options in (text.partition(":") for text in fixed)}
    trials = []
    chosen: list[tuple[Side, Settings]] = []
    for side in sides:
        wanted = [given[side.name]] if side.name in given else side.candidates(SLOTS[name])
        candidates = [completed(side, settings, directory, source, workload.items) for settings in wanted]
        rows = trial(side, candidates, few) if is_trial or len(candidates) > 1 else []
        trials += rows
        speeds = [row.get("output_tokens_per_s", 0.0) for row in rows]
        if rows and not any(speeds):
            click.echo(f"{side.name} is left out: it ran with none of its settings", err=True)
            continue
        chosen.append((side, candidates[speeds.index(max(speeds))] if rows else candidates[0]))
    figures = {} if is_trial else in_turns(chosen, items, repeats)
    save(
        record(
            "trial" if is_trial else "peers",
            workload={"name": name, "digest": workload.digest, "requests": len(items), "cap": cap},
            model=model,
            trials=trials,
            **figures,
        ),
        json_path,
    )


def completed(side: Side, settings: Settings, directory: Path, source: Path, items: Sequence[WorkItem]) -> Settings:
    """The settings with what they all share: the model, and room for the longest request of the whole workload."""
    longest = max(len(item.prompt) + item.output for item in items)
    length = {"max_model_len" if side is OURS else "max_len": -(-longest // 256) * 256}
    return {"model": str(model_of(side, directory, source, settings.get("dtype", "bfloat16"))), **length, **settings}


def trial(side: Side, candidates: Sequence[Settings], items: Sequence[WorkItem]) -> list[dict[str, Any]]:
    """How fast each candidate is on a few requests; one that does not run says why."""
    rows: list[dict[str, Any]] = []
    for settings in candidates:
        row: dict[str, Any] = {"side": side.name, "settings": shown(settings)}
        try:
            with Running(side, settings) as running:
                row |= one_run(running, items)[0] | {"load_s": running.loaded["load_s"]}
        except RuntimeError as error:
            row["error"] = str(error)
        rows.append(row)
        words = ", ".join(f"{name} {value}" for name, value in shown(settings).items())
        speed = f"{row['output_tokens_per_s']:.1f} tokens/s" if "error" not in row else row["error"]
        click.echo(f"trial of {side.name}, {words}: {speed}", err=True)
    return rows


def shown(settings: Settings) -> Settings:
    """Without the model's place on this machine."""
    return {name: value for name, value in settings.items() if name != "model"}


def in_turns(chosen: Sequence[tuple[Side, Settings]], items: Sequence[WorkItem], repeats: int) -> dict[str, Any]:
    """Runs of all sides in turns; the figures of the record."""
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side, _ in chosen}
    answers: dict[str, list[list[int]]] = {}
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(Running(side, settings)) for side, settings in chosen]
        taking_part = running
        for turn in range(repeats):
            for one in taking_part:
                run, answers[one.side.name] = one_run(one, items)
                runs[one.side.name].append(run)
                click.echo(f"turn {turn + 1}/{repeats}: {one.side.name} {run['output_tokens_per_s']:.1f} tokens/s", err=True)
            taking_part = [running[0], *sorted(taking_part[1:], key=lambda one: -_speeds(runs[one.side.name])[0])[:1]]
        sides = {
            one.side.name: {
                "settings": shown(one.settings),
                "versions": one.loaded["versions"],
                "load_s": one.loaded["load_s"],
                "output_tokens_per_s": spread(_speeds(runs[one.side.name])),
                "agreement": agreement(answers[OURS.name], answers[one.side.name]),
                "runs": runs[one.side.name],
            }
            for one in running
        }
    ours = _speeds(runs[OURS.name])
    ratios = {name: ratio(ours, _speeds(made)) for name, made in runs.items() if name != OURS.name}
    for peer, found in ratios.items():
        click.echo(f"{OURS.name} / {peer}: {found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f})")
    return {"sides": sides, "ratios": ratios}


def one_run(running: Running, items: Sequence[WorkItem]) -> tuple[dict[str, Any], list[list[int]]]:
    """Figures of one run, and its tokens. A first run warms up; that is not in `wall_s`, but is in `cores`."""
    with Meter() as meter:
        wall_s, tokens = running.generate(items)
    num_output = sum(item.output for item in items)
    return {"wall_s": wall_s, "output_tokens_per_s": num_output / wall_s, "cores": meter.cores}, tokens


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of the outputs that begin like ours."""
    same = sum(list(own[:AGREE]) == list(other[:AGREE]) for own, other in zip(ours, theirs, strict=True))
    return same / len(ours)


def _speeds(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [run["output_tokens_per_s"] for run in runs]


if __name__ == "__main__":
    main()
