"""The command line: arguments, texts, exit codes. What a command does stands in its room."""
