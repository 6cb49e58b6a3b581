"""From the tokens of a request to its text: characters, stop strings, tool calls, log probabilities."""
