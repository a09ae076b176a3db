"""The page at ``/admin``: static files, and a stream of what changes.

The files need no build step and nothing from elsewhere. What the page does, it does through the
routes that everybody has.
"""
