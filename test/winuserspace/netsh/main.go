// SPDX-License-Identifier: Apache-2.0

// Command netsh stands in for netsh.exe of Windows under Wine, whose own does
// nothing: it hands its arguments to the test, which really adds and deletes
// addresses, and prints and ends as the test says.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
)

func main() {
	// The test has a network namespace to itself, and this port in it.
	c, err := net.Dial("tcp", "127.0.0.1:5555")
	if err != nil {
		fmt.Println(err)
		os.Exit(3)
	}
	var answer struct {
		Text   string
		Status int
	}
	err = json.NewEncoder(c).Encode(os.Args[1:])
	if err == nil {
		err = json.NewDecoder(c).Decode(&answer)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(3)
	}
	fmt.Println(answer.Text)
	os.Exit(answer.Status)
}
