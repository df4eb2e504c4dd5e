// A small JSON reader and writer, enough for manifests, feeds and headers of checkpoints. As in Python, NaN, Infinity and
// -Infinity are numbers.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

class Json {
 public:
  enum class Kind { Null, Bool, Number, Text, List, Object };

  Json() = default;
  explicit Json(double number) : kind_(Kind::Number), number_(number) {}
  explicit Json(int64_t number)
      : kind_(Kind::Number), number_(static_cast<double>(number)), text_(std::to_string(number)) {}
  explicit Json(std::string text) : kind_(Kind::Text), text_(std::move(text)) {}

  // Throws std::runtime_error, which tells the position, if the text is no JSON.
  static Json parse(const std::string& text);
  static Json of(const std::vector<int64_t>& numbers);
  // As compact as possible, e.g. ["fc.weight","float32",[3,4]], without escapes of letters beyond ASCII.
  std::string dump() const;

  bool is_null() const { return kind_ == Kind::Null; }
  bool is_text() const { return kind_ == Kind::Text; }
  bool has(const std::string& key) const { return kind_ == Kind::Object && object_.count(key) != 0; }

  // Each throws std::runtime_error if the value is of another kind, or the key is missing.
  double number() const;
  int64_t integer() const;
  bool truth() const;
  const std::string& text() const;
  const std::vector<Json>& list() const;
  const std::map<std::string, Json>& object() const;
  const Json& at(const std::string& key) const;
  std::vector<int64_t> shape() const;

  // Makes an object or a list of a new value.
  void set(const std::string& key, Json value);
  void append(Json value);

 private:
  friend class Parser;

  Kind kind_ = Kind::Null;
  bool truth_ = false;
  double number_ = 0;
  // The digits of a number as they stood in the file: a double has not all integers of 64 bits.
  std::string text_;
  std::vector<Json> list_;
  std::map<std::string, Json> object_;
};
