// The mathematics of softmax attention on plain arrays, as in `regard.calculus`; the tests compare the two.

export function softmax(scores, beta = 1) {
  if (!scores.length) return [];
  const signed = beta < 0 ? scores.map((score) => -score) : scores;
  const visible = scores.map((score) => score !== -Infinity);
  const top = Math.max(...signed.filter((_, place) => visible[place]));
  const steep = Math.abs(beta);
  const weights = signed.map((score, place) => {
    if (!visible[place]) return 0;
    if (score === top) return 1;
    return steep === Infinity ? 0 : Math.exp(steep * (score - top));
  });
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  return total ? weights.map((weight) => weight / total) : weights;
}

export function logsumexp(scores, beta = 1) {
  const terms = scores.filter((score) => score !== -Infinity).map((score) => beta * score);
  if (!terms.length) return -Infinity;
  const top = Math.max(...terms);
  return top + Math.log(terms.reduce((sum, term) => sum + Math.exp(term - top), 0));
}

// In nats; accurate also where one weight is nearly one.
export function entropy(scores, beta = 1) {
  const signed = (beta < 0 ? scores.map((score) => -score) : scores).filter((_, place) => scores[place] !== -Infinity);
  if (!signed.length) return 0;
  const steep = Math.abs(beta), top = Math.max(...signed);
  if (steep === Infinity) return Math.log(signed.filter((score) => score === top).length);
  const winner = signed.indexOf(top);
  let excess = 0, energy = 0;
  signed.forEach((score, place) => {
    const gap = steep * (score - top), weight = Math.exp(gap);
    if (place !== winner) excess += weight;
    if (weight > 0) energy += weight * gap;
  });
  return Math.log1p(excess) - energy / (1 + excess);
}

export function entropySlope(scores, beta = 1) {
  if (!Number.isFinite(beta)) return 0;
  const weights = softmax(scores, beta), top = Math.max(...scores);
  const gaps = scores.map((score, place) => (weights[place] ? score - top : 0));
  const mean = dot(weights, gaps);
  return -beta * weights.reduce((sum, weight, place) => sum + weight * (gaps[place] - mean) ** 2, 0);
}

// J[i][j] = beta y_i (delta_ij - y_j); the diagonal is the sum of the others, so that nothing cancels.
export function jacobian(scores, beta = 1) {
  const weights = softmax(scores, beta);
  return weights.map((weight, i) => weights.map((other, j) => {
    if (i !== j) return -beta * weight * other;
    return beta * weight * weights.reduce((sum, one, place) => (place === i ? sum : sum + one), 0);
  }));
}

export function dot(a, b) {
  let sum = 0;
  for (let place = 0; place < a.length; place++) sum += a[place] * b[place];
  return sum;
}

// The change of a query's score when the key is shifted by a vector, or stretched by a factor.
export function scoreChange(query, key, { shift = null, stretch = null, beta = 1 / Math.sqrt(query.length) }) {
  const direction = shift || key.map((part) => part * (stretch - 1));
  return beta * dot(query, direction);
}

// The exact law of one changed key: weight a, output h, its value v, score change s -> a', h', factor of the others.
export function perturbKey(weight, output, value, change) {
  const rest = 1 - weight;
  if (rest === 0) {
    const removed = change === -Infinity;
    return { weight: removed ? 0 : weight, output: removed ? output.map(() => 0) : output.slice(), factor: 1 };
  }
  const raised = change > 0, decay = Math.exp(-Math.abs(change)), loss = -Math.expm1(-Math.abs(change));
  const denominator = raised ? weight + rest * decay : weight > 0.5 ? rest + weight * decay : 1 - weight * loss;
  const step = weight * (raised ? loss : -loss) / denominator;
  return {
    weight: weight * (raised ? 1 : decay) / denominator,
    output: output.map((part, place) => part + step * (value[place] - part)),
    factor: (raised ? decay : 1) / denominator,
  };
}

// Attention of every query over all keys, the run beside the law.
export function attend(queries, keys, values, beta = 1 / Math.sqrt(keys[0].length), causal = false) {
  const weights = queries.map((query, row) => softmax(keys.map((key, column) => (causal && column > row ? -Infinity : dot(query, key))), beta));
  return { weights, output: weights.map((row) => mix(row, values)) };
}

export function mix(weights, values) {
  return values[0].map((_, part) => weights.reduce((sum, weight, place) => sum + weight * values[place][part], 0));
}

// phi(x) = elu(x) + 1, the feature map of linear attention.
export function elu1(vector) {
  return vector.map((part) => (part > 0 ? part + 1 : Math.exp(part)));
}

// Linear attention: weights in proportion to phi(q) . phi(k); `output` is computed as a recurrence, without the weights.
export function linearAttend(queries, keys, values, causal = false) {
  const features = queries.map(elu1), held = keys.map(elu1);
  const weights = features.map((query, row) => {
    const products = held.map((key, column) => (causal && column > row ? 0 : dot(query, key)));
    const total = products.reduce((sum, product) => sum + product, 0);
    return products.map((product) => product / total);
  });
  const size = held[0].length, width = values[0].length;
  const state = Array.from({ length: size }, () => new Array(width).fill(0)), total = new Array(size).fill(0);
  const add = (place) => held[place].forEach((part, k) => {
    total[k] += part;
    for (let v = 0; v < width; v++) state[k][v] += part * values[place][v];
  });
  if (!causal) held.forEach((_, place) => add(place));
  const output = features.map((query, row) => {
    if (causal) add(row);
    const normal = dot(query, total);
    return Array.from({ length: width }, (_, v) => query.reduce((sum, part, k) => sum + part * state[k][v], 0) / normal);
  });
  return { weights, output };
}

// score = -alpha |position(key) - position(query) - center|^2 on a grid; the weights of one query over all pixels.
export function quadraticWeights([rows, columns], [row, column], center, alpha) {
  const scores = [];
  for (let y = 0; y < rows; y++) for (let x = 0; x < columns; x++) {
    scores.push(-alpha * ((y - row - center[0]) ** 2 + (x - column - center[1]) ** 2));
  }
  return softmax(scores);
}

// Every pixel's output of heads with quadratic scores, one kernel value each: sum over heads of kernel * attended pixel.
export function quadraticHeads(image, [rows, columns], heads, kernel) {
  const result = new Array(rows * columns).fill(0);
  heads.forEach(({ center, alpha }, head) => {
    for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
      // The score is a sum over axes, so the weights are a product: two short softmaxes in place of one long one.
      const down = softmax(Array.from({ length: rows }, (_, y) => -alpha * (y - row - center[0]) ** 2));
      const across = softmax(Array.from({ length: columns }, (_, x) => -alpha * (x - column - center[1]) ** 2));
      let sum = 0;
      for (let y = 0; y < rows; y++) if (down[y] > 1e-12) sum += down[y] * dot(across, image.slice(y * columns, (y + 1) * columns));
      result[row * columns + column] += kernel[head] * sum;
    }
  });
  return result;
}

// The convolution that the heads become when each attends to one pixel: offsets (row, column) and a kernel value each.
export function convolve(image, [rows, columns], offsets, kernel) {
  return Array.from({ length: rows * columns }, (_, place) => {
    const row = Math.floor(place / columns), column = place % columns;
    return offsets.reduce((sum, [down, across], head) => {
      const y = Math.min(Math.max(row + down, 0), rows - 1), x = Math.min(Math.max(column + across, 0), columns - 1);
      return sum + kernel[head] * image[y * columns + x];
    }, 0);
  });
}
