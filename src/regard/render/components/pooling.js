// Matrices made smaller, and what a number says of them.

// The mean over blocks, at most `size` by `size` of them.
export function poolMatrix(values, rows, columns, size) {
  const cell = Math.max(1, Math.ceil(Math.max(rows, columns) / size));
  if (cell === 1) return { shape: [rows, columns], values };
  const height = Math.ceil(rows / cell), width = Math.ceil(columns / cell), sums = new Float32Array(height * width), counts = new Float32Array(height * width);
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
    const place = Math.floor(row / cell) * width + Math.floor(column / cell);
    sums[place] += values[row * columns + column];
    counts[place] += 1;
  }
  return { shape: [height, width], values: sums.map((sum, place) => sum / counts[place]) };
}

// The mean entropy of the rows, in nats.
export function entropyOf(values, rows, columns) {
  let sum = 0;
  for (let place = 0; place < rows * columns; place++) if (values[place] > 0) sum -= values[place] * Math.log(values[place]);
  return sum / Math.max(rows, 1);
}
