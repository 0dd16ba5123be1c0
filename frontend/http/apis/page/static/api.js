// Calls of this server's API, with the visitor's key.

/** An answer that is an error, or none at all: then `status` is 0. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code ?? "";
  }
}

export class Api {
  /** key: a function that returns the key to send, or "". */
  constructor(key) {
    this.#key = key;
  }

  #key;

  /** The JSON of a GET. Throws ApiError. */
  async get(path, signal) {
    const response = await this.#fetch(path, { signal });
    return this.#read(() => response.json());
  }

  /** The events of a streamed answer to a POST. Throws ApiError; an AbortError where `signal` ends it. */
  async *stream(path, body, { headers, signal }) {
    const response = await this.#fetch(path, {
      method: "POST",
      headers: { ...headers, "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await this.#read(() => reader.read());
      if (done) throw new ApiError("The connection ended before the answer was complete.");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // a comment that keeps the connection open, or an empty line
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw errorOf(event, 500);
        yield event;
      }
    }
  }

  async #fetch(path, init) {
    const headers = new Headers(init.headers);
    if (this.#key()) headers.set("authorization", `Bearer ${this.#key()}`);
    const url = new URL(path, document.baseURI);
    const response = await this.#read(() => fetch(url, { ...init, headers, cache: "no-store" }));
    if (!response.ok) {
      throw errorOf(await response.json().catch(() => ({})), response.status);
    }
    return response;
  }

  /** What `read` returns; that the network failed is an ApiError. */
  async #read(read) {
    try {
      return await read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer.");
    }
  }
}

function errorOf(body, status) {
  const { message, code } = body.error ?? {};
  return new ApiError(message ?? `The server answered with status ${status}.`, { status, code });
}
