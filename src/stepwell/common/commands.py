"""A command run to its end, or killed with all that it started."""

from collections.abc import Mapping, Sequence

from stepwell.common.child import Child, Tail, how_it_ended

KEPT = 200
"""Lines of output."""


class CommandFailed(Exception):
    """It could not be started, or ended with a failure; the text has its last words."""


async def run_command(command: Sequence[str], *, env: Mapping[str, str], stdin: bytes) -> str:
    """The last lines that it wrote to stdout. Cancelled, or ended, it leaves no process behind."""
    out, err = Tail(KEPT), Tail(KEPT)
    try:
        child = Child(command, env=env, hear=out.add, hear_errors=err.add, stdin=stdin)
    except (OSError, ValueError) as failure:
        raise CommandFailed(f"{command[0]} cannot be started: {failure}") from None
    try:
        code = await child.wait()
    finally:
        await child.close()
    if code != 0:
        raise CommandFailed(f"{command[0]} ended with {how_it_ended(code)}: {str(err) or out}")
    return str(out)
