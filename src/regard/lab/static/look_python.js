// The lines that reproduce a view: those of the server, which load the model and read the input, made to show one head.

export function inputLines(panel) {
  const { python } = panel.input;
  return Array.isArray(python) ? python.slice() : python.trimEnd().split("\n");
}

function weightingNote(weighting) {
  if (weighting === "value") return "# the lab multiplies each weight by the length of its key's value";
  if (weighting === "output") return "# the lab multiplies each weight by the length of what its key adds to the output";
  return null;
}

// `all` shows every head, otherwise the one that is chosen, of the pinned token if there is one.
export function headLines(panel, all = false) {
  const { state } = panel, lines = inputLines(panel), last = lines[lines.length - 1].match(/^show\(model, (.*)\)$/), token = state.token === undefined || state.token === null ? null : Number(state.token);
  const layer = state.layer || 0, head = state.head || 0;
  if (!last) {
    const inputs = lines.some((line) => line.startsWith("source, target")) ? "*tokens" : "tokens";
    if (inputs === "*tokens") lines.push("from regard.visualize.text_input import encode_text", "tokens = [torch.tensor([encode_text(tokenizer, text)]) for text in (source, target)]");
    lines.push("from regard.visualize import attention_maps", "for layer in attention_maps(model, " + inputs + "):", `    print(layer.title, layer.rows([${token ?? 0}])${all ? "" : `[${head}]`})`);
    return `${lines.join("\n")}\n`;
  }
  lines.pop();
  if (state.weighting === "rollout") {
    const name = last[1].split(",")[0];
    lines.push("from regard.visualize import attention_maps", `maps = attention_maps(model, ${name})`, "share = torch.zeros(1, maps[-1].queries)", `share[0, ${token ?? 0}] = 1`, "for layer in reversed(maps):", "    share = (share + share @ layer.rows(range(layer.queries)).float().mean(0)) / 2", "print(share)");
  } else if (all) lines.push(`show(model, ${last[1]}).save("heads.svg")`);
  else {
    const grid = panel.text().grid, start = panel.text().start || 0;
    let query = "";
    if (token !== null && !grid) query = `, query=${token}`;
    if (token !== null && grid && token >= start) {
      const [rows, columns] = grid, [high, wide] = panel.info.image_size || grid, patch = token - start;
      query = `, query=(${Math.floor((Math.floor(patch / columns) + 0.5) * high / rows)}, ${Math.floor((patch % columns + 0.5) * wide / columns)})`;
    }
    lines.push(...[weightingNote(state.weighting), `show(model, ${last[1]}, layer=${layer}, head=${head}${state.view === "matrix" ? "" : query}).save("head.svg")`].filter(Boolean));
  }
  return `${lines.join("\n")}\n`;
}
