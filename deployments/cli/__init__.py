"""The command ``lorafleet``: one module per command or group of commands.

Knows how to talk to people and to scripts. What a command does is done elsewhere.
"""

import typer

from deployments.cli.adapters import adapters_app
from deployments.cli.bench import bench
from deployments.cli.check import check
from deployments.cli.doctor import doctor
from deployments.cli.serve import serve
from deployments.cli.size import size_command
from deployments.cli.state import state_app

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(adapters_app, name="adapters")
app.add_typer(state_app, name="state")
app.command()(bench)
app.command()(check)
app.command()(doctor)
app.command()(serve)
app.command("size")(size_command)


@app.callback()
def main() -> None:
    """One base model, thousands of LoRA adapters."""
