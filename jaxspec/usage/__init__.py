"""What vLLM has of its reports on usage; none are made here."""
