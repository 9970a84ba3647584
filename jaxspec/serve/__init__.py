"""The OpenAI-compatible server.

Reading order:

1. `__main__`, `flags`, `settings`, `launcher`: from a command line to a server that
   listens.
2. `connections`: limits on their number and on the time for a request to arrive.
   `app`: all endpoints behind all checks; `middleware` and `errors` are those checks
   and what is answered when something fails.
3. `generation`: the endpoints that generate. `requests` reads what clients send, which
   becomes `prompts`; `serving` brings them to the engine, past `admission`;
   `responses` writes the answers, `streaming` joins the texts of a request and sends
   them while the client is connected, and `response_store` keeps responses.
4. `server_info`, `metrics`, `load_report`: what the server tells about itself; `page`
   shows it. `development`: how developers put it to sleep.
5. `ray_app`: the same application in replicas that Ray Serve runs.
"""
