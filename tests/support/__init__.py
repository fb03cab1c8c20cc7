"""What all suites use.

setup.sh          makes .venv and .venv-vllm
system_packages   the Debian packages that suites need: installs them where it may, else says how
suites            the runner behind `make test`, `make check`, `make lint`, `make slow`
real_parts        pytest plugin: counts tests passed against real parts; in CI a skip is a failure
processes         runs commands as an operator does; finds what a test left behind
daemon            a real `kvd serve` in a scratch folder, killed and restarted at will
"""
