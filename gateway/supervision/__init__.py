"""Local replica processes: started, watched, restarted, stopped."""
