// The last minutes of the engines' counters, and what follows from them: rates and percentiles. Pure functions of samples
//
//   {at, server, engines: {INDEX: {running, waiting, cache, prompt, generated, latencies: {NAME: [count of each bucket]}}}}

import { load, save } from "./storage.js";

export const LONGEST_S = 15 * 60;
const KEPT_S = 5 * 60; // over a reload
const RATE_OVER_S = 3; // steps of an engine are not as regular as the samples
const PERCENTILES_OVER_S = 30;

export class Samples {
  #samples = load(sessionStorage, "samples", []).filter(({ at }) => at > Date.now() / 1000 - KEPT_S);
  /** Upper bounds of the latencies' buckets, by name. */
  bounds = {};

  /** Takes what /ui/live answered. */
  add({ server, engines, bounds }) {
    const at = Date.now() / 1000;
    const known = engines.filter((each) => each.num_running !== null);
    this.bounds = bounds;
    this.#samples.push({
      at,
      server,
      engines: Object.fromEntries(
        known.map((each) => [
          each.index,
          {
            running: each.num_running,
            waiting: each.num_waiting,
            cache: each.kv_cache_usage,
            prompt: each.prompt_tokens,
            generated: each.generated_tokens,
            latencies: each.latencies,
          },
        ]),
      ),
    });
    this.#samples = this.#samples.filter((each) => each.at > at - LONGEST_S);
  }

  keep() {
    save(sessionStorage, "samples", this.#samples.filter(({ at }) => at > Date.now() / 1000 - KEPT_S));
  }

  /** Seconds from the oldest sample to `at`. */
  age(at) {
    return this.#samples.length ? at - this.#samples[0].at : 0;
  }

  since(at) {
    return this.#samples.filter((each) => each.at >= at);
  }
}

/** [time, value] of an engine's gauge; null where the engine did not answer. */
export function gauge(samples, index, name) {
  return samples.map(({ at, engines }) => [at, engines[index]?.[name] ?? null]);
}

/** [time, growth per second] of an engine's counter; null where it began anew, as after a restart. */
export function rate(samples, index, name) {
  return samples.map((now, at) => {
    const before = samples[earliest(samples, at, RATE_OVER_S)];
    const grown = now.server === before.server ? now.engines[index]?.[name] - before.engines[index]?.[name] : NaN;
    return [now.at, grown >= 0 && now.at > before.at ? grown / (now.at - before.at) : null];
  });
}

/** [time, latency below which this share of the observations of the last half minute is], over some engines. */
export function percentile(samples, indices, name, bounds, share) {
  return samples.map((now, at) => {
    const before = samples[earliest(samples, at, PERCENTILES_OVER_S)];
    const counts = new Array(bounds.length + 1).fill(0);
    for (const index of indices) {
      const [new_, old] = [now.engines[index]?.latencies[name], before.engines[index]?.latencies[name]];
      if (now.server !== before.server || !new_ || !old || new_.some((count, bucket) => count < old[bucket])) continue;
      new_.forEach((count, bucket) => (counts[bucket] += count - old[bucket]));
    }
    return [now.at, quantile(counts, bounds, share)];
  });
}

/** The value below which a share of a histogram's observations is, taken as spread evenly over each bucket. */
export function quantile(counts, bounds, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total === 0) return null;
  let below = 0;
  for (const [bucket, count] of counts.entries()) {
    if (count && below + count >= share * total) {
      const low = bucket ? bounds[bucket - 1] : 0;
      const high = bounds[bucket] ?? low; // above all bounds: it is at least the last one
      return low + (high - low) * ((share * total - below) / count);
    }
    below += count;
  }
  return bounds.at(-1);
}

/** The index of the earliest sample that is at most so much older than the one at `at`. */
function earliest(samples, at, seconds) {
  let first = at;
  while (first > 0 && samples[first - 1].at >= samples[at].at - seconds) first--;
  return first;
}
