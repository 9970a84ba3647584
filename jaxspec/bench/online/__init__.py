"""Requests to a server that runs, and what came of them.

Reading order: `serve_task` (what a run is asked to do, and its files), `traffic` (when
requests are sent), `client` (one request, timed), `connection` (HTTP), `scrape` (the
server's counts) and `serve_report` (the numbers of a run).
"""
