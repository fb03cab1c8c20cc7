"""Two widgets, both painting `kvtop.text.Line`s: `canvas` (lines as they are) and `grid` (a table with a cursor)."""
