// SPDX-License-Identifier: Apache-2.0

// Command netsh replaces netsh.exe under Wine, whose own version does nothing. It sends
// its arguments to the test, which adds and deletes addresses. It then has the output and
// exit status that the test returns.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
)

func main() {
	// The test has its own network namespace with this port.
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
