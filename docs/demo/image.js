"use strict";
// From strokes to the images that the networks were trained on: MNIST's box and center, and rotations.

const SIDE = 28; // of a network's image, in pixels
const BOX = 20; // of the digit inside it
const INK = 280; // of the drawing area

/** The brightness of a canvas, 0 to 1, row by row. */
function inkOf(canvas) {
  const { data } = canvas.getContext("2d", { willReadFrequently: true }).getImageData(0, 0, INK, INK);
  const ink = new Float32Array(INK * INK);
  for (let i = 0; i < ink.length; i++) ink[i] = data[4 * i] / 255;
  return ink;
}

/** Where the ink is: its box, its center of mass and its amount; null without ink. */
function measure(ink) {
  let left = INK, right = -1, top = INK, bottom = -1, mass = 0, x = 0, y = 0;
  for (let row = 0; row < INK; row++) {
    for (let column = 0; column < INK; column++) {
      const value = ink[row * INK + column];
      if (value < 0.02) continue;
      left = Math.min(left, column); right = Math.max(right, column);
      top = Math.min(top, row); bottom = Math.max(bottom, row);
      mass += value; x += value * (column + 0.5); y += value * (row + 0.5);
    }
  }
  return mass ? { size: Math.max(right - left, bottom - top) + 1, x: x / mass, y: y / mass } : null;
}

/** Brightness between pixels, 0 outside. */
function sample(ink, x, y) {
  const column = Math.floor(x - 0.5), row = Math.floor(y - 0.5);
  const right = x - 0.5 - column, down = y - 0.5 - row;
  const at = (r, c) => (r < 0 || c < 0 || r >= INK || c >= INK ? 0 : ink[r * INK + c]);
  return (1 - down) * ((1 - right) * at(row, column) + right * at(row, column + 1))
    + down * ((1 - right) * at(row + 1, column) + right * at(row + 1, column + 1));
}

/** The drawing, scaled to MNIST's box, its center of mass in the middle, rotated counter-clockwise by degrees. */
function rotated(ink, place, degrees) {
  const step = place.size / BOX; // of a small pixel, in pixels of the drawing
  const fine = Math.max(1, Math.min(8, Math.round(step))); // samples a small pixel and axis, against jagged edges
  const cos = Math.cos(degrees * Math.PI / 180), sin = Math.sin(degrees * Math.PI / 180);
  const image = new Float32Array(SIDE * SIDE);
  for (let row = 0; row < SIDE; row++) {
    for (let column = 0; column < SIDE; column++) {
      let sum = 0;
      for (let i = 0; i < fine; i++) {
        for (let j = 0; j < fine; j++) {
          const y = (row + (i + 0.5) / fine - SIDE / 2) * step, x = (column + (j + 0.5) / fine - SIDE / 2) * step;
          sum += sample(ink, place.x + cos * x - sin * y, place.y + sin * x + cos * y);
        }
      }
      image[row * SIDE + column] = sum / (fine * fine);
    }
  }
  return image;
}

/** A 90° rotation counter-clockwise, which moves pixels and changes none. */
function quarter(image) {
  const result = new Float32Array(image.length);
  for (let row = 0; row < SIDE; row++) {
    for (let column = 0; column < SIDE; column++) {
      result[row * SIDE + column] = image[column * SIDE + (SIDE - 1 - row)];
    }
  }
  return result;
}

/** The image at every angle: rotations by less than 90° are sampled, the others are these rotated by multiples of 90°. */
function allAngles(ink, place, step) {
  const images = [];
  for (let angle = 0; angle < 90; angle += step) images.push(rotated(ink, place, angle));
  for (let i = images.length; i < 360 / step; i++) images.push(quarter(images[i - 90 / step]));
  return images;
}

// Strokes of digits to take, in pixels of the drawing area: ones that the plain network changes its mind about.
const STROKES = {
  1: [[[116, 94], [133, 58], [157, 131], [152, 213]]],
  2: [[[90, 106], [92, 82], [139, 47], [180, 59], [187, 102], [154, 129], [138, 190], [65, 205], [156, 219], [195, 205]]],
  4: [[[146, 53], [97, 113], [84, 141], [131, 145], [200, 139]], [[172, 66], [177, 136], [149, 222]]],
  5: [[[174, 53], [113, 51], [113, 77], [91, 109], [83, 117], [132, 107], [173, 140], [204, 172], [172, 212], [149, 204], [112, 214]]],
  7: [[[111, 83], [140, 64], [184, 63], [151, 107], [146, 154], [107, 234]]],
};
