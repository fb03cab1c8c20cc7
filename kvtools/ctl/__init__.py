"""kvctl: who holds the KV memory of each engine, and what may it hold?

app        the commands: words and options, nothing else
tables     what list, show and watch print, as tables and as JSON
details    what show prints
limits     decide what a limit means for a pool, write it, wait for it
changing   a limit from the question to the last line: limit, limit-percent, restore
removal    delete one segment
pruning    remove what the dead left
plan       several limits as one: parse, share out, apply all or nothing
applying   the plan in force, once or as engines come and go
watching   the screen of `kvctl watch`, and doing something again and again
shell      the interactive shell
asking     questions at a terminal, and what replaces them without one
naming     finding what a NAME means; completion
peers      engines whose segments say nothing about them: what can be learned from outside
journal    kvctl's own memory of limits, for segments without an owner file
"""
