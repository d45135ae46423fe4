"use strict";
// Requests that fit, by the rule of `Cache.requests` in oscar_zoo/engines/sglang/capacity.py.
function requestsThatFit(needs, kind, { memory, gpus, weights, context }) {
  const left = Math.max(0, Math.floor(needs.usable * memory) - Math.floor(weights / gpus));
  const each = kind.token * context + kind.window_token * Math.min(context, kind.window) + kind.request;
  return Math.floor(left / each);
}

if (typeof document !== "undefined" && document.getElementById("fit-section")) {
  const needs = JSON.parse(document.getElementById("fit-section").dataset.needs);
  const [memory, gpus, weights] = ["memory", "gpus", "weights"].map((id) => document.getElementById(id));

  const update = () => {
    const rows = [...document.getElementById("fits").rows];
    const known = weights.value !== "" && Number(memory.value) > 0 && Number(weights.value) >= 0;
    rows.forEach((row, at) => {
      needs.caches[gpus.value].forEach((kind, column) => {
        const asked = {
          memory: Math.round(Number(memory.value) * needs.memory_unit),
          gpus: Number(gpus.value),
          weights: Math.round(Number(weights.value) * 1e9),
          context: needs.contexts[at],
        };
        const text = known ? requestsThatFit(needs, kind, asked).toLocaleString("en").replaceAll(",", "\u202f") : "–";
        row.cells[column + 1].textContent = text;
      });
    });
    const many = gpus.value === "1" ? "1 GPU" : `${gpus.value} GPUs`;
    document.getElementById("place").textContent = known
      ? `${many} of ${memory.value} GiB`
      : "your GPUs, once memory and weights are entered";
  };

  for (const input of [memory, gpus, weights]) input.addEventListener("input", update);
  document.getElementById("fit-form").hidden = false;
  update();
}
