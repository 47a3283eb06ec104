"""What a turn costs a router: growing conversations against this gateway and others, in turns."""
