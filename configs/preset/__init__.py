"""Ready-made algorithms: ``preset=NAME`` on the command line."""
