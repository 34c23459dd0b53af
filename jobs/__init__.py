"""What `ray job submit` runs: one thin main per job."""
