"""Which turns may begin now, which wait, and which are turned away: before anything is computed for them."""
