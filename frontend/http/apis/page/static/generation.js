// One answer: its request, and what the stream's events add to the message.

const ALTERNATIVES = 5;

/** The body of a chat completion. `fields`: sampling fields, without those that are left to the model. */
export function requestBody({ model, messages, fields, withTokens }) {
  return {
    model,
    messages,
    ...fields,
    ...(withTokens ? { logprobs: true, top_logprobs: ALTERNATIVES } : {}),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

/**
 * Reads the stream into the message; calls `onChange` after each event. Throws what the stream throws: the message then
 * has what came before.
 */
export async function receive(events, message, onChange) {
  const beganMs = performance.now();
  const { figures } = message;
  let firstMs = null;
  for await (const { choices, usage } of events) {
    if (usage) note(figures, usage);
    const choice = choices?.[0];
    const delta = choice?.delta ?? {};
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (thought) message.reasoning += thought;
    if (delta.content) message.text += delta.content;
    for (const part of delta.tool_calls ?? []) addCall(message.calls, part);
    if (choice?.logprobs?.content) message.tokens.push(...choice.logprobs.content.map(tokenOf));
    if (choice?.finish_reason) figures.finishReason = choice.finish_reason;
    if (thought || delta.content || delta.tool_calls) {
      const nowMs = performance.now();
      firstMs ??= nowMs;
      figures.firstSeconds = (firstMs - beganMs) / 1000;
      figures.laterSeconds = (nowMs - firstMs) / 1000;
    }
    onChange();
  }
}

/** Adds a part of a call: its first has the name, the others more of the arguments. */
function addCall(calls, { index, id, function: part }) {
  const call = (calls[index] ??= { id: id ?? String(index), name: "", arguments: "" });
  call.name += part?.name ?? "";
  call.arguments += part?.arguments ?? "";
}

function note(figures, usage) {
  figures.promptTokens = usage.prompt_tokens;
  figures.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
  figures.tokens = usage.completion_tokens;
}

/** A token as it is kept: its bytes, since a character may be spread over several tokens. */
function tokenOf({ token, logprob, bytes, top_logprobs: others }) {
  return { token, logprob, bytes, others: (others ?? []).map((each) => [each.token, each.logprob]) };
}

/** Tokens per second after the first; null if there are too few to tell. */
export function speedOf({ tokens = 0, laterSeconds = 0 }) {
  return tokens > 1 && laterSeconds > 0 ? (tokens - 1) / laterSeconds : null;
}
