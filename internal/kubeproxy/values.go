// SPDX-License-Identifier: Apache-2.0

package kubeproxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
)

// reader checks the type of a value in JSON like kube-proxy's decoder, and returns the
// value as a flag expects it. Null stands for a missing field.
type reader func(value any) (string, error)

func textValue(value any) (string, error) {
	text, ok := value.(string)
	if !ok && value != nil {
		return "", fmt.Errorf("%s is not a string", inJSON(value))
	}
	return text, nil
}

func boolValue(value any) (string, error) {
	b, ok := value.(bool)
	if !ok && value != nil {
		return "", fmt.Errorf("%s is not true or false", inJSON(value))
	}
	return strconv.FormatBool(b), nil
}

func int32Value(value any) (string, error) {
	number, err := numberValue(value)
	if err == nil {
		_, err = strconv.ParseInt(number, 10, 32)
	}
	if err != nil {
		return "", fmt.Errorf("%s is not an integer of 32 bits", inJSON(value))
	}
	return number, nil
}

func uint32Value(value any) (string, error) {
	number, err := numberValue(value)
	if err == nil {
		_, err = strconv.ParseUint(number, 10, 32)
	}
	if err != nil {
		return "", fmt.Errorf("%s is not an unsigned integer of 32 bits", inJSON(value))
	}
	return number, nil
}

func floatValue(value any) (string, error) {
	number, err := numberValue(value)
	if err == nil {
		_, err = strconv.ParseFloat(number, 32)
	}
	if err != nil {
		return "", fmt.Errorf("%s is not a floating-point number of 32 bits", inJSON(value))
	}
	return number, nil
}

func numberValue(value any) (string, error) {
	number, ok := value.(json.Number)
	switch {
	case value == nil:
		return "0", nil
	case !ok:
		return "", errors.New("not a number")
	}
	return number.String(), nil
}

// durationValue refuses null, because kube-proxy does.
func durationValue(value any) (string, error) {
	text, ok := value.(string)
	d, err := time.ParseDuration(text)
	if !ok || err != nil {
		return "", fmt.Errorf("%s is not a duration such as \"30s\"", inJSON(value))
	}
	return d.String(), nil
}

// timeValue returns a duration that may be a number of nanoseconds.
func timeValue(value any) (string, error) {
	if _, ok := value.(string); ok {
		return durationValue(value)
	}
	number, err := numberValue(value)
	n, parseErr := strconv.ParseInt(number, 10, 64)
	if err != nil || parseErr != nil {
		return "", fmt.Errorf("%s is not a duration such as \"30s\", nor a number of nanoseconds", inJSON(value))
	}
	return time.Duration(n).String(), nil
}

// optional returns a reader that accepts null.
func optional(read reader) reader {
	return func(value any) (string, error) {
		if value == nil {
			return "", nil
		}
		return read(value)
	}
}

func quantityValue(value any) (string, error) {
	text, ok := value.(string)
	if !ok {
		var err error
		if text, err = numberValue(value); err != nil {
			return "", fmt.Errorf("%s is not a quantity such as \"1Mi\"", inJSON(value))
		}
	}
	q, err := resource.ParseQuantity(strings.TrimSpace(text))
	if err != nil {
		return "", fmt.Errorf("%s is not a quantity such as \"1Mi\"", inJSON(value))
	}
	return strconv.FormatInt(q.Value(), 10), nil
}

func listValue(value any) (string, error) {
	list, ok := value.([]any)
	if !ok && value != nil {
		return "", fmt.Errorf("%s is not a list", inJSON(value))
	}
	var items []string
	for i, item := range list {
		text, err := textValue(item)
		if err != nil {
			return "", fmt.Errorf("item %d: %w", i, err)
		}
		if text == "" || strings.Contains(text, ",") {
			text = strconv.Quote(text) // not a CIDR; the quotes keep it recognizable in the result
		}
		items = append(items, text)
	}
	return strings.Join(items, ","), nil
}

func gatesValue(value any) (string, error) {
	gates, ok := value.(map[string]any)
	if !ok && value != nil {
		return "", fmt.Errorf("%s is not an object", inJSON(value))
	}
	values := map[string]bool{}
	for name, value := range gates {
		text, err := boolValue(value)
		if err != nil {
			return "", fmt.Errorf("%s: %w", name, err)
		}
		values[name] = text == "true"
	}
	return inJSON(values), nil
}

func vmoduleValue(value any) (string, error) {
	list, ok := value.([]any)
	if !ok && value != nil {
		return "", fmt.Errorf("%s is not a list", inJSON(value))
	}
	var items []string
	for i, item := range list {
		object, ok := item.(map[string]any)
		if !ok {
			return "", fmt.Errorf("item %d: %s is not an object with a filePattern", i, inJSON(item))
		}
		pattern, err := textValue(object["filePattern"])
		verbosity, verbosityErr := uint32Value(object["verbosity"])
		if err == nil && (pattern == "" || strings.ContainsAny(pattern, "=,")) {
			err = fmt.Errorf("filePattern %q is empty or contains = or a comma", pattern)
		}
		if verbosityErr == nil {
			verbosityErr = within(0, maxInt32)(verbosity)
		}
		if err := errors.Join(err, verbosityErr); err != nil {
			return "", fmt.Errorf("item %d: %w", i, err)
		}
		items = append(items, pattern+"="+verbosity)
	}
	return strings.Join(items, ","), nil
}

func inJSON(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // value was decoded from JSON
	}
	return string(text)
}
