"""The public gRPC face: converts and delegates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio

from common.rpc.interceptor import REQUEST_ID_KEY
from common.rpc.tracing import traceparent_of
from common.rpc.worker_info import server_version
from dspark.v1 import inference_service_pb2 as pb
from dspark.v1.inference_service_pb2_grpc import InferenceServiceServicer
from services.router import convert
from services.router.router import Router


class RouterServicer(InferenceServiceServicer):
    """`dspark.v1.InferenceService` over a router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse]:
        with self._router.meters.counting("Generate"):
            traceparent = traceparent_of(context.invocation_metadata())
            wanted = convert.generation_request_from_pb(request, traceparent)
            context.set_trailing_metadata(((REQUEST_ID_KEY, wanted.request_id),))
            generation = self._router.pipeline.generate(wanted, timeout_s=context.time_remaining())
            async with aclosing(generation) as chunks:
                async for chunk in chunks:
                    yield convert.chunk_to_pb(chunk)

    async def Abort(
        self,
        request: pb.AbortRequest,
        context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse],
    ) -> pb.AbortResponse:
        return pb.AbortResponse(found=self._router.contexts.abort(request.request_id))

    async def Tokenize(
        self,
        request: pb.TokenizeRequest,
        context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse],
    ) -> pb.TokenizeResponse:
        prompt = convert.tokenize_prompt_from_pb(request)
        return pb.TokenizeResponse(token_ids=await self._router.validator.tokenize(prompt))

    async def Detokenize(
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        text = self._router.tokenizer.decode(
            request.token_ids, skip_special_tokens=not request.keep_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self,
        request: pb.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.GetModelInfoResponse],
    ) -> pb.GetModelInfoResponse:
        router, model = self._router, self._router.workers.model()
        return pb.GetModelInfoResponse(
            model=router.config.model,
            max_context_length=model.max_context_length,
            vocab_size=model.vocab_size,
            eos_token_ids=router.tokenizer.eos_token_ids,
            bos_token_id=router.tokenizer.bos_token_id,
            draft_length=model.draft_length,
            fingerprint=model.fingerprint,
            default_sampling=convert.default_sampling_to_pb(),
        )

    async def GetServerInfo(
        self,
        request: pb.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        router = self._router
        return pb.GetServerInfoResponse(
            version=server_version(),
            role="router",
            uptime_s=router.uptime_s,
            queued_requests=router.queue.num_waiting,
            running_requests=router.num_placed,
            details=router.details(),
            workers={
                worker.address: worker.info
                for worker in (*router.workers.prefill, *router.workers.decode)
                if worker.info is not None
            },
        )

    async def ListWorkers(
        self,
        request: pb.ListWorkersRequest,
        context: grpc.aio.ServicerContext[pb.ListWorkersRequest, pb.ListWorkersResponse],
    ) -> pb.ListWorkersResponse:
        workers = (*self._router.workers.prefill, *self._router.workers.decode)
        return pb.ListWorkersResponse(workers=[convert.worker_to_pb(w) for w in workers])
