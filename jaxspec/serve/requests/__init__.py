"""Request bodies: schemas and their conversion to engine parameters.

Reading order: `protocol` (schemas), `params` (sampling parameters), `response_input`
(converts a Responses request to a chat), `tool_choice` (which tools a chat may call)
and `tool_parsers` (find tool calls in generated text).
"""

from jaxspec.extras import SERVE_PACKAGES, require_packages

require_packages("serve", "The server", SERVE_PACKAGES)
