"""Other libraries' names for what sparkdl does, so that their users change the imports only."""
