"""Measures the budgets, each beside its floor in the same run: `python -m tests.bench [--quick] [--only NAME ...] [--json]`.

measure   alternating rounds, medians, the one way to time something here
floor     the least a control plane costs: a bare msgspec and uvloop server
control   exists, leases and single values beside that floor
figures   what keeping the figures costs the daemon
arena     batches of values through the daemon beside plain copies
disk      the disk tier beside raw O_DIRECT
ttft      time to first token: cold, warm from disk, the engine's own cache (needs .venv-vllm)
connector the connector's saves and loads beside memcpy, without an engine
throughput   what saving costs an engine (needs .venv-vllm)
kvtop     what the dashboard costs
gate      what the gate adds to a request
startup   what a command costs before it does anything
doctor    what a look at a host takes
report    the table, RESULTS.md, results.json and the README's block

A ratio says more than a rate: the machine's mood is in both of its halves. Each result is
{"name", "what", "value", "unit", "floor", "ratio", "budget", "ok"}: ratio is value/floor where more is better, and
floor/value turned so for times, except where the budget itself is a multiple (`<= 1.5x`).
"""
