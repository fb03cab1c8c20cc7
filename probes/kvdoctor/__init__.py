"""kvdoctor: can this host do GPU-direct, is the POSIX tier usable, and what is the one thing to mend?

Collect, judge and render are strictly apart, so that a captured host is a test case, a support bundle and one side of a diff.

facts      one typed, versioned, JSON-serialisable document about a host
collect/   files, commands and system calls -> facts              parse/   text -> facts, pure
rules/     facts -> results, pure                                 results  a rule's answer, a whole report
verdict    results -> verdicts, causes, next step                 report   results -> text
explain    what a check means (explain.toml)                      fix      results -> a script, printed only
capture    a host -> a directory (private says what of each file leaves, redact replaces names)
diff       two captures -> what differs                           prove    real I/O, asked for
api        all of it without the command line                     app      the command
"""
