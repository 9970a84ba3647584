"""The OpenAI-compatible server.

Reading order:

1. `__main__`, `flags`, `settings`, `launcher`: from a command line to a server that
   listens.
2. `connections`: limits on the number of connections, and on the time for a request to
   arrive. `app`: all endpoints behind all checks; `middleware` has those checks,
   `errors` the error responses.
3. `generation`: the endpoints that generate. `requests` has the requests' schemas;
   `prompts` encodes prompts; `admission` limits the queue; `serving` passes them to the
   engine; `responses` writes the results; `streaming` merges the outputs of a request's
   prompts and sends them while the client is connected; `response_store` stores
   responses.
4. `server_info`, `metrics`, `load_report`: the server's state; `page` shows it.
   `development`: sleep and wake-up endpoints. `corpora`: texts for suffix drafts.
5. `ray_app`: the same application in replicas that Ray Serve runs; `batch`: the same
   application for the requests of a file.
"""
