"""The shared core of kvtools: what every command stands on. Standard library only, except `cli`.

errors     the exception tree; each error knows its exit code and says what to do
exits      exit codes, one IntEnum: they are an API
units      sizes and times, parsed and printed
urls       addresses of HTTP servers, as people type them
output     tables, JSON, colour: data on stdout, all else on stderr
interrupts Ctrl-C and `kill` while a command owns something that must not stay behind
config     flag > environment > file > default, and where each value came from
segments   what lies in shared memory: pool segments, owner sidecars, stats segments
devices    GPUs by sysfs, NVML or amdsmi
ctl        kvctl's commands
elastic    virtual-memory back ends and the elastic KV pool
cli        the one Typer app: names of commands, resolved when used
completion tab completion for bash, zsh and fish
settings   `kvtools config`: what the environment sets, and where each value came from
"""

__version__ = "0.1.0"
