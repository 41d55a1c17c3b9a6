"""What a person meets: the command line and everything it prints."""
