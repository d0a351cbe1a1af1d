"""`worker batch run`: a batch file on engines of this machine, without a queue or a server.

Relies on `LocalRoad` for the work, on `options` for the files, on `engine_options` for what an engine is told.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from worker import log
from worker.batch.options import input_option as input_file
from worker.batch.options import line_options, open_output, open_plan, output_options, take_options, tell_end
from worker.command import Command, is_verbose, note, option, say
from worker.engine_options import engine_options, engine_settings
from worker.progress import Progress, print_above
from worker.settings import Settings

if TYPE_CHECKING:
    from worker.batch.local_road import Summary
    from worker.batch.output import BatchOutput
    from worker.batch.plan import Plan

IN_ANSWERS = ("model", "dtype", "kv_dtype", "quantisation", "max_model_len")
"""What an engine is told that answers depend on."""


@click.command(
    "run",
    cls=Command,
    short_help="Answer a file on this machine, without a server.",
    examples=[
        "worker batch run -i in.jsonl -o out.jsonl --model smollm2-135m-instruct",
        "worker batch run -i in.jsonl -o out.jsonl --gpu 0 --resume",
        "worker batch run -i prompts.parquet --prompt-column text -o out.jsonl --order input",
    ],
)
@input_file
@output_options(required=True)
@line_options
@option("--json", "as_json", is_flag=True, help="Print figures of the run as JSON.")
@engine_options
def run(*, as_json: bool, **given: Any) -> None:
    """Answer each line of a file with an engine of this machine, without a queue or a server.

    Ctrl-C or SIGTERM keeps what is done; the same command with --resume goes on.
    """
    from worker.batch.local_road import LocalRoad

    log.prints = print_above
    log.configure(verbose=is_verbose(), form="auto" if is_verbose() else "brief")
    options = take_options(given)
    settings = Settings(**engine_settings(given))
    parameters = {name: getattr(settings.engine, name) for name in IN_ANSWERS}
    with open_plan(options, settings.model_name) as plan, open_output(plan, options, parameters) as output:
        batch_id = batch_id_of(plan.fingerprint, output.record["parameters"])
        with Progress(options.input.name, "lines") as progress:

            def tell(now: "Summary") -> None:
                progress.update(
                    plan.num_done, plan.num_lines, f"{now.tokens_per_s:,.0f} tokens/s" if now.num_tokens else "starting"
                )

            road = LocalRoad(settings, plan, output, batch_id, order=options.order, on_progress=tell)
            summary = road.run() if plan.num_done < plan.num_lines else road.summary
        output.sync()
        if as_json:
            say(json.dumps(_data(summary, plan, output)))
        code = tell_end(output, options)
    if summary.num_lines:
        note(f"batch: {_in_words(summary)}")
    raise click.exceptions.Exit(code)


def batch_id_of(fingerprint: str, parameters: Mapping[str, Any]) -> str:
    """The same for the same file and parameters: so are the seeds that are drawn for its lines."""
    digest = hashlib.sha256(json.dumps([fingerprint, parameters], sort_keys=True).encode())
    return f"batch_{digest.hexdigest()[:24]}"


def _data(summary: "Summary", plan: "Plan", output: "BatchOutput") -> dict[str, Any]:
    return {
        "lines": plan.num_lines,
        "answers": output.num_answers,
        "errors": output.num_errors,
        "lines_of_this_run": summary.num_lines,
        "prompt_tokens": summary.num_prompt_tokens,
        "generated_tokens": summary.num_tokens,
        "seconds": round(summary.seconds, 3),
        "tokens_per_s": round(summary.tokens_per_s, 1),
        "slot_steps": dict(summary.slot_steps),
    }


def _in_words(summary: "Summary") -> str:
    """How fast it was, and what the slots did."""
    total = sum(summary.slot_steps.values()) or 1
    slots = ", ".join(f"{state.replace('_', ' ')} {count / total:.0%}" for state, count in summary.slot_steps.items() if count)
    amount = f"{summary.num_lines:,} lines, {summary.num_failed:,} of them errors, and {summary.num_tokens:,} tokens"
    return f"{amount} in {summary.seconds:.1f} s, {summary.tokens_per_s:,.0f} tokens/s; slots: {slots}"
