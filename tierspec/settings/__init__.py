"""Groups of settings, and the way from a YAML file to them; `tierspec.config` is the whole."""
