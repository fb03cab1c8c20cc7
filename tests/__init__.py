"""The tests mirror the packages: tests/kvd tests kvd, and so on.

support   what all suites use: a daemon to talk to, commands to run, a guard against leaks, the runner behind `make test`
repo      what holds for the whole tree: sizes of files, man pages, imports, the wheel
bench     measures the budgets (`python -m tests.bench`)
cases     data: captured hosts, golden files
"""
