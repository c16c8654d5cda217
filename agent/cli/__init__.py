"""The command line: arguments, texts, exit codes. Commands are carried out in other rooms."""
