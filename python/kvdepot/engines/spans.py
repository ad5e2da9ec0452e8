"""OpenTelemetry spans at an engine's face, if the process has a tracer provider.

``Spans.of_process`` imports nothing: a process whose tracing is set up has imported the library itself. A span is
written when its work has ended, with the times at which it began and ended, so that nothing has to be closed when a
request is aborted. ``begin`` is for work whose parts in other processes become its children.
"""

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

SCOPE = "kvdepot"
DISABLED = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"
"""OpenTelemetry's own variable: names of instrumentations that stay off, with commas between them; ``*`` = all."""

ERROR_TYPE = "error.type"
"""OpenTelemetry's name for the kind of a failure."""

LINKS_MAX = 32
"""Maximum number of other requests that a span of shared work links to."""

Carrier = dict[str, str]
"""Context of a trace in the W3C's headers (``traceparent``, ``tracestate``), for other processes."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Method = Callable[Concatenate["Spans", Parameters], Result]


def _harmless(method: Method[Parameters, Result]) -> Method[Parameters, Result | None]:
    """Makes a method return ``None`` after a failure. The first one is logged, and ends tracing: engines go on."""

    @functools.wraps(method)
    def call(self: "Spans", *args: Parameters.args, **named: Parameters.kwargs) -> Result | None:
        if self.failed:
            return None
        try:
            return method(self, *args, **named)
        except Exception as error:
            self.failed = True
            self.logger.exception("kvdepot: no more spans, because the tracer failed: %s", type(error).__name__)
            return None

    return cast("Method[Parameters, Result | None]", call)


class Spans:
    """Writes spans with the tracer of this process. No method raises.

    Attributes:
        failed: whether the tracer has failed; then nothing is written any more.
    """

    def __init__(self, tracer: "Tracer", logger: logging.Logger) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._nowhere = Context()
        self._headers = TraceContextTextMapPropagator()
        self._tracer = tracer
        self.logger = logger
        self.failed = False

    @staticmethod
    def of_process(logger: logging.Logger) -> "Spans | None":
        """Returns the spans of this process; ``None`` if it has no tracer provider, or if kvdepot's spans are disabled.

        ``logger`` is told if the tracer fails later.
        """
        trace = sys.modules.get("opentelemetry.trace")
        disabled = {name.strip() for name in os.environ.get(DISABLED, "").split(",")}
        if trace is None or disabled & {SCOPE, "*"}:
            return None
        try:
            provider = trace.get_tracer_provider()
            if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
                return None
            from kvdepot import __version__

            tracer = provider.get_tracer(SCOPE, __version__)
            if isinstance(tracer, trace.NoOpTracer):
                return None
            logger.info("kvdepot: OpenTelemetry spans are written, because this process has a tracer provider")
            return Spans(tracer, logger)
        except Exception:
            logger.exception("kvdepot: no spans: the tracer provider of this process cannot be used")
            return None

    @_harmless
    def parent(self, headers: Mapping[str, str] | None) -> "Context | None":
        """Returns the context that a request's headers name; ``None`` if they name none."""
        if not headers:
            return None
        found = self._headers.extract(dict(headers), self._nowhere)
        return found if self._trace.get_current_span(found).get_span_context().is_valid else None

    @_harmless
    def write(
        self,
        name: str,
        begun_ns: int,
        parent: "Context | None",
        attributes: Mapping[str, Any],
        *,
        ended_ns: int | None = None,
        failure: str = "",
        others: Sequence[Carrier] = (),
    ) -> "Context | None":
        """Writes a span that began at ``begun_ns`` (of the epoch) and has ended. Returns its context, for children.

        Args:
            name: name of the span.
            begun_ns: nanoseconds since the epoch.
            parent: context that it is a child of; ``None`` = it begins a trace.
            attributes: attributes; those that are ``None`` are left out.
            ended_ns: when it ended, in nanoseconds since the epoch; ``None`` = now.
            failure: kind of the failure that it ended with; empty = none.
            others: other requests that share the work, to be linked to.
        """
        found = [self._headers.extract(carrier, self._nowhere) for carrier in others[:LINKS_MAX]]
        links = [self._trace.Link(self._trace.get_current_span(one).get_span_context()) for one in found]
        span = self._start(name, begun_ns, parent, attributes, links)
        if failure:
            self._fail(span, failure)
        span.end(ended_ns)
        return self._trace.set_span_in_context(span, parent or self._nowhere)

    @_harmless
    def begin(self, name: str, parent: "Context | None", attributes: Mapping[str, Any]) -> "Span":
        """Begins a span, which has to be ended by ``end``."""
        return self._start(name, time.time_ns(), parent, attributes, ())

    @_harmless
    def end(self, span: "Span | None", failure: str = "") -> None:
        """Ends a span of ``begin``; ``failure``: the kind of the failure that it ended with, empty = none."""
        if span is not None:
            if failure:
                self._fail(span, failure)
            span.end()

    @_harmless
    def carrier(self, of: "Span | Context | None") -> Carrier | None:
        """Returns the headers for another process to continue a trace; ``None`` if the trace is not sampled."""
        if of is None:
            return None
        context = self._trace.set_span_in_context(of, self._nowhere) if isinstance(of, self._trace.Span) else of
        if not self._trace.get_current_span(context).get_span_context().trace_flags.sampled:
            return None
        headers: Carrier = {}
        self._headers.inject(headers, context)
        return headers

    def _start(
        self,
        name: str,
        begun_ns: int,
        parent: "Context | None",
        attributes: Mapping[str, Any],
        links: Sequence[Any],
    ) -> "Span":
        # A context is always given: without one, the library takes whatever span is current on this thread.
        return self._tracer.start_span(
            name,
            parent or self._nowhere,
            self._trace.SpanKind.CLIENT,
            {key: value for key, value in attributes.items() if value is not None},
            links,
            begun_ns,
        )

    def _fail(self, span: "Span", kind: str) -> None:
        span.set_attribute(ERROR_TYPE, kind)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))
