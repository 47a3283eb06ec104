"""Everything that generates tokens, behind one protocol."""
