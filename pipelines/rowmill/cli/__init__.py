"""The command line `rowmill …`: parse arguments, call one engine function, print its report."""
