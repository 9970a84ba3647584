"""Owns the endpoints of corpora for suffix drafts, which are SGLang's."""

from typing import Any

from fastapi import APIRouter

from jaxspec.errors import RequestError, UnsupportedError
from jaxspec.serve.requests.protocol import Body, Entries
from jaxspec.serve.serving import Serving, new_id


class AddCorpusBody(Body):
    """Body of POST /add_external_corpus: documents or lists of token ids.

    Attributes:
        cache_salt: Only requests with the same salt find the texts.
    """

    corpus_id: str | None = None
    documents: Entries[str] | None = None
    token_chunks: Entries[Entries[int]] | None = None
    file_path: str | None = None
    cache_salt: str | None = None


class RemoveCorpusBody(Body):
    """Body of POST /remove_external_corpus."""

    corpus_id: str


def corpus_routes(serving: Serving) -> APIRouter:
    """Make the endpoints that add, remove and list corpora."""
    router, engine = APIRouter(), serving.engine

    def chunks_of(body: AddCorpusBody) -> list[list[int]]:
        if body.token_chunks is not None:
            return body.token_chunks
        return [serving.tokenizer.encode(one, False) for one in body.documents or ()]

    @router.post("/add_external_corpus")
    async def add_external_corpus(body: AddCorpusBody) -> dict[str, Any]:
        """Add texts that suffix drafts may copy."""
        serving.check_body(body)
        if body.file_path is not None:
            raise UnsupportedError(
                "file_path is not supported, because clients must not read the "
                "server's files: send documents.",
                parameter="file_path",
                value=body.file_path,
            )
        if (body.documents is None) == (body.token_chunks is None):
            message = "Give either documents or token_chunks."
            raise RequestError(message, parameter="documents")
        chunks = await engine.run_in_thread(lambda: chunks_of(body), is_long=True)
        corpus_id = body.corpus_id or new_id()
        count = await engine.add_external_corpus(corpus_id, chunks, body.cache_salt)
        return {
            "success": True,
            "corpus_id": corpus_id,
            "message": f"Loaded corpus {corpus_id!r} with {count} tokens.",
            "loaded_token_count": count,
        }

    @router.post("/remove_external_corpus")
    async def remove_external_corpus(body: RemoveCorpusBody) -> dict[str, Any]:
        """Remove a corpus."""
        serving.check_body(body)
        await engine.remove_external_corpus(body.corpus_id)
        return {"success": True, "message": f"Removed corpus {body.corpus_id!r}."}

    @router.get("/list_external_corpora")
    async def list_external_corpora() -> dict[str, Any]:
        """Return the number of tokens of each corpus."""
        counts = await engine.list_external_corpora()
        return {"success": True, "corpus_token_counts": counts, "message": ""}

    return router
