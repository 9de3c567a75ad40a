"""The command line `rowmill …`: parse arguments, call one engine function, print its report.

What belongs here: commands, exit codes, `rowmill ui`. What does not: any command's work.
"""
