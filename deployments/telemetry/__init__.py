"""What is told of single requests: spans to a trace collector, and log lines for machines.

Off unless asked for; then nothing here is called.
"""
