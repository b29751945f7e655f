"""Programs that run tools of their own and attach to the registry."""
